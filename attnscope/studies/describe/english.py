"""Closed classes of English words, by which found terms are named and against which they compete."""

_WORDS = {
    "determiners": "a an the this that these those each every some any no all both either neither",
    "pronouns": "i me my mine myself you your yours yourself he him his himself she her hers herself it its itself we "
    "us our ours ourselves they them their theirs themselves who whom whose which what",
    "prepositions": "of in to for with on at by from about into over after before through between under against "
    "during without within upon near off down up out around behind across along toward towards",
    "conjunctions": "and or but nor so yet if because although though while when since unless than as",
    "auxiliaries": "be am is are was were been being have has had do does did will would can could shall should may "
    "might must",
    "negations": "not no never n't nothing none nobody nowhere without cannot",
}

CLOSED_CLASSES = {name: frozenset(words.split()) for name, words in _WORDS.items()}
"""Words of each class in lower case. A word may be in several."""

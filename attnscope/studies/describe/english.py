"""Sort English words into classes (parts of speech). Descriptions of heads name the words that heads attend to by them.

A closed class, such as prepositions, has a list of all its words. An open class, such as verbs, has a list of frequent
words and of endings. A word has the same class everywhere: there is no tagger that reads the sentence. A word on no
list and without such an ending is a noun.
"""

from functools import cache

_CLOSED = {
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

CLOSED_CLASSES = {name: frozenset(words.split()) for name, words in _CLOSED.items()}
"""Closed class -> its words in lower case. A word may be in several classes."""

_OPEN = {
    "numbers": "one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty hundred "
    "thousand million billion first second third half dozen",
    "interjections": "yes yeah oh ah hi hello hey please thanks ok okay wow well dear",
    "adverbs": "very too also just even still again here there now then soon always often ever already almost quite "
    "rather really back away maybe perhaps however once twice later ago instead together therefore thus else far how "
    "why where only early ahead alone apart aside forward forever sometimes somewhere anywhere everywhere anyway home "
    "indeed long much more most less least today tonight tomorrow yesterday outside inside besides enough somehow",
    "verbs": "say says said tell told ask go goes went gone going come came get gets got gotten give gives gave given "
    "take takes took taken make makes made see saw seen know knew known think thought find found feel felt keep kept "
    "let leave left put bring brought buy bought pay paid sell sold send sent spend spent stand stood sit sat run ran "
    "hear heard hold held meet met lead led lose lost win won write wrote written read speak spoke spoken eat ate "
    "eaten drink drank drive drove fly flew fall fell begin began begun become became break broke grow grew draw drew "
    "choose chose catch caught teach taught seek sought fight fought hit cut set shut cost hurt build built lie lay "
    "rise rose show shown throw threw wear wore wake sing sang swim swam understand understood forget forgot want "
    "wish need use try look seem like love hate hope help start stop turn call talk walk happen believe remember add "
    "allow appear agree apply avoid belong bear carry change consider continue create decide deserve die enjoy expect "
    "explain follow handle include join kill learn listen live move offer open pass play provide prefer reach receive "
    "recommend remain require return save serve stay suggest support suppose thank visit wait watch wonder contact "
    "used done stolen beg cry suck linger apologize assume beat bend bite blow check click confirm deal discuss "
    "ensure exist fix fit forgive grab hang hide hurry imagine improve intend jump knock laugh lend mean meant mind "
    "notice order plan please prepare prove pull push realize recognize reduce refuse regret reply shake share sleep "
    "smile solve steal swear taste touch treat trust vote worry",
    "adjectives": "good better best bad worse worst great big bigger small little large short high higher low lower "
    "old older new newer young right wrong greater direct former hidden true false real sure able same other "
    "different own free full empty hot cold warm cool dark light clean clear easy hard difficult simple strong weak "
    "rich poor cheap expensive nice fine happy sad sorry sick safe late fast slow quick black white red green blue "
    "brown golden gray yellow deep wide close final main major whole next last few several many such local public "
    "private human social political military nuclear national international american british chinese english french "
    "german iranian iraqi israeli japanese palestinian russian favorite favourite awesome amazing excellent perfect "
    "special recent current future past general common certain ready strange sweet tiny tight tough usual various "
    "wild wise worth smart serious similar single smooth soft solid strict sudden total ugly unique normal friendly "
    "lovely fresh fair fat huge important interesting boring tired wet dry dead alive angry afraid mad proud quiet "
    "loud rude fantastic horrible terrible wonderful extraordinary mediocre honest helpful pregnant affordable "
    "reasonable bright brief",
}

_FREQUENT_WORDS = {name: frozenset(words.split()) for name, words in _OPEN.items()}
"""Open class -> its frequent words in lower case."""

_ENDINGS = {
    "adverbs": ("ly",),
    "verbs": ("ing", "ed", "ize", "ise", "ify"),
    "adjectives": ("ful", "ous", "able", "ible", "less", "ical", "ish"),
}

_NOUNS_WITH_ENDINGS = (
    "family july italy reply supply assembly thing things something nothing anything everything morning evening "
    "king ring spring string wing building ceiling wedding bed seed need speed deed feed wine exercise rise "
    "noise promise size prize table cable fish dish wish english"
)
"""Nouns that end like another class, such as "family" like adverbs."""

OPEN_CLASSES = ("nouns", "verbs", "adjectives", "adverbs", "numbers", "interjections")
"""The names of the open classes."""


@cache
def class_of(word: str) -> str:
    """Return the class of a word, closed or open. A word in several classes gets the first of them in `_CLOSED`.

    A string on no list with a character that is no letter, such as "3rd" or ",", has no class: "".

    Args:
        word: The word in lower case.
    """
    # Look the word up in lists first, because endings are guesses.
    for name, words in (*CLOSED_CLASSES.items(), *_FREQUENT_WORDS.items()):
        if word in words:
            return name
    if not word.isalpha():
        return ""
    # Endings mean little in words of up to four letters, and nothing in the listed nouns.
    if word not in _NOUNS_WITH_ENDINGS.split() and len(word) > 4:
        for name, endings in _ENDINGS.items():
            if word.endswith(endings):
                return name
    # Third person: "walks" is a form of "walk".
    if word.endswith("s") and word[:-1] in _FREQUENT_WORDS["verbs"]:
        return "verbs"
    return "nouns"

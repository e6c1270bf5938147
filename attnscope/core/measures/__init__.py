"""The head measures.

Every measure is a sum and a count for each text and head, never a mean. Padding, batches and blocks then stay
exact, and a value is sum / count over whatever was added up. Two rules hold for all:

* Queries that are padding, or that may attend to nothing, count 0. So does a query for which a measure makes no sense:
  for the mass on certain keys, a query that may attend to none of them (no previous token, no token like it elsewhere,
  no punctuation before it).
* `<name>_active` is the same without the keys on which trained heads rest (special tokens and the first): the sum over
  the other keys, divided by all the mass that is on them. Both are sums, so a value is again sum / count.

`catalogue` says what each measure is called and means, without torch. `facts` has what measures must know of a text,
`dense` their definition on dense weights, `sums` the same without dense weights. None knows a model or a tokenizer.
"""

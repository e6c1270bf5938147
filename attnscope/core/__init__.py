"""Tensors in, tensors out: attention, measures, probes. Knows no files, no tokenizer, no printing."""

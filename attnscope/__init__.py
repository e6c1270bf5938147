"""attnscope: what each attention head does on your text."""

__version__ = "0.1.0"

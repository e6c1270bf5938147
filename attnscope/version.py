"""The version, in a module of its own that imports nothing."""

VERSION = "0.1.0"

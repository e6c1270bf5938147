"""Figures of many texts, written to a folder."""

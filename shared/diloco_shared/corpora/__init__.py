"""Corpora: from a folder of text to memory-mapped tokens.

`sources` and `documents` read text, `tokenizers` turns it into numbers, `prepare` writes those to
files, `prepared` opens them, and `mix` reads several corpora as one.
"""

"""Fragments, merge, outer optimizer and codecs: arrays in, arrays out."""

"""`diloco doctor`: whether a machine can work for a hub; `judging` decides, `*_io.py` measure."""

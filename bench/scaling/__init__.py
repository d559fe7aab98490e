"""What a syncer costs as learners, fragments and sizes grow; used by bench/scale.py."""

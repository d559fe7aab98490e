"""Learners of several hosts in whole worlds: connections, processes, and what they compute."""

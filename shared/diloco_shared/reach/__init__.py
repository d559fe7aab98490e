"""What a request or a specification may reach: folders, modules and places of checkpoints.

A site says so in the settings of its processes. Whoever submits runs cannot reach further.
"""

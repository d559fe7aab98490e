"""What keeps a hub: its folder, nodes, certificates, backups; its message server, run and watched.

The command that runs the server is `process/keep_hub.py`: units of operators name it by that path.
"""

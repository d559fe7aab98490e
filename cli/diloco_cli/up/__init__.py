"""`diloco up`: every service of one machine as supervised processes."""

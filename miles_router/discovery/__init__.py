"""Workers found without registering: `--discover dns://NAME:PORT` and `--discover file:PATH`.

sources.py     what a source lists now: the addresses of a DNS name, the lines of a file
discovery.py   compares the lists with the registered workers, adds and drains
"""

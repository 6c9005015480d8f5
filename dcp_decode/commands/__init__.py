"""One module a command of `dcp-decode`; each exports its click command, and `cli.py` lists them."""

"""`python -m dcp_decode`: the same as the console script `dcp-decode`."""

from dcp_decode.cli import main

main()

"""Generated gRPC messages and stubs for `proto/tailgate/v1`. Written by `generate.py`; never edited by hand."""

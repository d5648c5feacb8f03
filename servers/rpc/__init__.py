"""Generated gRPC messages and stubs for `proto/tailgate/v1`. Written by `make proto`; never edited by hand."""

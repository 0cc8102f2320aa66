"""Generated from proto/inference.proto by `make proto`; never edited by hand.

`inference_pb2` is for gRPC and its reflection, `inference_pb` and `inference_connect` are Connect's.
"""

"""Methods, one file each: policy, local training, aggregation and claim."""

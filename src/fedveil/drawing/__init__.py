"""What pictures are drawn with; no other room imports matplotlib."""

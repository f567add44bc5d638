"""Inputs made by a fixed public function of each example, before training."""

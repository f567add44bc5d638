"""Many runs side by side on one machine."""

"""The parts that `tidegate up` runs on this machine: starts, adopts, watches and stops them."""

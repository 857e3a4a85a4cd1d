"""The first batch proves it: one loss on a cut of the first batch, sharded and not, compared module by module."""

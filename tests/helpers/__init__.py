"""Things that tests of several rooms share."""

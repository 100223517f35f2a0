"""Models of other programs, in and out, and modules of other libraries around ours."""

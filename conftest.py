"""For every test: Triton kernels run in Triton's interpreter, which has to be chosen before triton is imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # on a machine with a GPU, TRITON_INTERPRET=0 runs them on it

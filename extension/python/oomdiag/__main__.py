from oomdiag import _main

_main()

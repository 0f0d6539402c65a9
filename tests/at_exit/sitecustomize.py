"""For the programs that tests start: torch 2.15 aborts now and then (exit code 134), with and without us, when Python ends
while a thread of the autograd engine is still on its way to rest (pytorch/pytorch issue 190489)."""
import atexit
import time

atexit.register(time.sleep, 0.3)

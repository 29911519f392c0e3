"""Tests of the native kernels through their Python interface; native/tests holds those in C."""

"""CUDA C++ device code only; compiled at run time by fu_compile.jit."""

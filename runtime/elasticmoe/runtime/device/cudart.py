"""The calls of CUDA's runtime that a thread makes for which a process that ends doesn't wait, each through ctypes.

A thread that comes back once the interpreter is gone is ended there. Inside torch's C++ that ends the whole process, by
SIGABRT; ctypes is C.
"""

import ctypes

READ_ONLY = 0x08
"""cudaHostRegisterReadOnly: without it, memory that is mapped for reading alone can't be registered."""


def set_device(index: int) -> int:
    """Have the calling thread's further calls be for that device; returns CUDA's error code, 0 if it worked."""
    return _call("cudaSetDevice", ctypes.c_int(index))


def register(start: int, num_bytes: int, flags: int) -> int:
    """Pin host memory; returns CUDA's error code, 0 if it worked."""
    return _call("cudaHostRegister", ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), ctypes.c_uint(flags))


def unregister(start: int) -> int:
    """Unpin host memory that was pinned from `start`; returns CUDA's error code, 0 if it worked."""
    return _call("cudaHostUnregister", ctypes.c_void_p(start))


def library() -> ctypes.CDLL:
    """Return what holds CUDA's runtime once torch is imported, which loads it for everyone to see."""
    return ctypes.CDLL(None)


def _call(name: str, *args: object) -> int:
    runtime = library()
    error = int(getattr(runtime, name)(*args))
    if error:
        runtime.cudaGetLastError()  # CUDA would hand it to the thread's next launch
    return error

// glibc 2.32 has a variable that says whether a process has one thread, and the shared_ptr of libstdc++ looks
// at it before it counts. Compiled on such a system the library would not load on an older one, where torch
// itself runs (its wheels need 2.28). This definition takes the variable's place in this library alone:
// always several threads.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

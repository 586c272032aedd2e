// libgpu_lacking_twin.so: a driver of either vendor that has next to nothing, for tests of loading.
extern "C" __attribute__((visibility("default"))) int cuInit(unsigned) { return 0; }
extern "C" __attribute__((visibility("default"))) int hipInit(unsigned) { return 0; }

// Python bindings of what is no arithmetic: checksums, malloc settings, SIMD levels and the thread pool.
#include "bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"
#include "dispatch.h"
#include "hash.h"
#include "pool.h"

#include <sys/mman.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace overspill {
namespace {

// The bytes of anything contiguous: by the buffer protocol (bytes, memoryview, mmap, numpy), else by DLPack
// (torch). Holds the exporter for as long as it lives.
class Bytes {
 public:
  explicit Bytes(nb::handle object) {
    if (PyObject_CheckBuffer(object.ptr())) {
      if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) {
        PyErr_Clear();
        throw nb::type_error("the buffer must be contiguous");
      }
      held_ = true;
      data = view_.buf;
      nbytes = std::size_t(view_.len);
      return;
    }
    using Any = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
    if (!nb::try_cast<Any>(object, array_, false)) {
      throw nb::type_error("expected a contiguous buffer or CPU array");
    }
    data = array_.data();
    nbytes = array_.nbytes();
  }
  ~Bytes() {
    if (held_) PyBuffer_Release(&view_);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  const void* data = nullptr;
  std::size_t nbytes = 0;

 private:
  Py_buffer view_{};
  bool held_ = false;
  nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> array_;
};

std::uint64_t hash_whole(nb::object buffer) {
  const Bytes bytes(buffer);
  const nb::gil_scoped_release released;
  return xxh3_64(bytes.data, bytes.nbytes);
}

nb::object hash_pieces(nb::object buffer, std::size_t piece_nbytes) {
  if (piece_nbytes == 0) throw nb::value_error("piece_nbytes must be at least 1");
  const Bytes bytes(buffer);
  auto* hashes = new std::vector<std::uint64_t>();
  nb::capsule owner(hashes, [](void* p) noexcept { delete static_cast<std::vector<std::uint64_t>*>(p); });
  {
    const nb::gil_scoped_release released;
    const auto* at = static_cast<const unsigned char*>(bytes.data);
    for (std::size_t left = bytes.nbytes; left > 0;) {
      const std::size_t piece = left < piece_nbytes ? left : piece_nbytes;
      hashes->push_back(xxh3_64(at, piece));
      at += piece;
      left -= piece;
    }
  }
  using Hashes = nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>;
  return nb::cast(Hashes(hashes->data(), {hashes->size()}, owner));
}

bool trim() {
#if defined(__GLIBC__)
  const nb::gil_scoped_release released;
  return malloc_trim(0) == 1;
#else
  return false;
#endif
}

bool set_malloc(int mmap_threshold_nbytes, int trim_threshold_nbytes, int arena_max) {
#if defined(__GLIBC__)
  return mallopt(M_MMAP_THRESHOLD, mmap_threshold_nbytes) == 1 &&
         mallopt(M_TRIM_THRESHOLD, trim_threshold_nbytes) == 1 && mallopt(M_ARENA_MAX, arena_max) == 1;
#else
  (void)mmap_threshold_nbytes, (void)trim_threshold_nbytes, (void)arena_max;
  return false;
#endif
}

// Whole pages; any later access is a fault.
void forbid_access(nb::handle buffer) {
  const Bytes bytes(buffer);
  if (mprotect(const_cast<void*>(bytes.data), bytes.nbytes, PROT_NONE) != 0)
    throw std::runtime_error(std::string("mprotect: ") + std::strerror(errno));
}

}  // namespace

void bind_system(nb::module_& m) {
  using nb::arg;
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), arg("threads"))
      .def_prop_ro("threads", [](const ThreadPool& pool) {
        pool.check_process();
        return pool.threads();
      });
  m.def("simd_level", [] { return simd_levels().front(); });
  m.def("simd_levels", &simd_levels);
  m.def("xxh3_64", &hash_whole, arg("buffer"));
  m.def("xxh3_pieces", &hash_pieces, arg("buffer"), arg("piece_nbytes"));
  m.def("forbid_access", &forbid_access, arg("buffer"));
  m.def("malloc_trim", &trim);
  m.def("set_malloc", &set_malloc, arg("mmap_threshold_nbytes"), arg("trim_threshold_nbytes"), arg("arena_max"));
}

}  // namespace overspill

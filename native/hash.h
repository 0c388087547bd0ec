// XXH3-64 over bytes, as the store's checksum. xxhash.h (BSD-2, vendored) is compiled in hash.cpp only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace overspill {

std::uint64_t xxh3_64(const void* data, std::size_t nbytes);

}  // namespace overspill

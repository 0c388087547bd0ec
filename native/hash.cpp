// The one place that compiles xxhash.h. It chooses SSE2 or NEON by itself; that already outruns a disk.
#define XXH_INLINE_ALL
#include "third_party/xxhash.h"

#include "hash.h"

namespace overspill {

std::uint64_t xxh3_64(const void* data, std::size_t nbytes) { return XXH3_64bits(data, nbytes); }

}  // namespace overspill

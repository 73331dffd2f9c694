"""The metadata of a GGUF file, read plainly and trustingly: for files of the test data alone."""

import struct

FORMATS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?")))
FORMATS |= {10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


def metadata(data):
    """The keys of a GGUF file (bytes) and their values."""
    assert data[:4] == b"GGUF"
    at = 24

    def one(kind):
        nonlocal at
        if kind == STRING:
            (size,) = struct.unpack_from("<Q", data, at)
            at += 8 + size
            return data[at - size : at].decode()
        if kind == ARRAY:
            inner, count = struct.unpack_from("<IQ", data, at)
            at += 12
            return [one(inner) for _ in range(count)]
        (value,) = struct.unpack_from(FORMATS[kind], data, at)
        at += struct.calcsize(FORMATS[kind])
        return value

    return {one(STRING): one(one(4)) for _ in range(struct.unpack_from("<Q", data, 16)[0])}

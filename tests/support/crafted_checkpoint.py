"""Changes of a saved step by someone who also writes the manifest anew, so that every SHA-256 is right."""

import dataclasses
import json
import struct

import tensorstore

from jaxpar.checkpoint.folder import list_files, record_files
from jaxpar.checkpoint.manifest import FILE_NAME, read_manifest

MAGIC, BLOCK_BYTES = b"\x28\xb5\x2f\xfd", 128 << 10


def open_store(step):
    """The key-value store of a step's arrays."""
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{step}/state/"}).result()


def seal(step, **changes):
    """Writes the manifest of a step whose files were changed."""
    files = record_files(step, [name for name in list_files(step) if name != FILE_NAME])
    manifest = dataclasses.replace(read_manifest(step), files=files, **changes)
    (step / FILE_NAME).write_text(manifest.render(), encoding="ascii")


def change_metadata(step, name, **changes):
    """Changes the metadata of an array, such as ``chunk_grid``."""
    store = open_store(step)
    found = json.loads(store.read(f"{name}/zarr.json").result().value) | changes
    store.write(f"{name}/zarr.json", json.dumps(found)).result()
    seal(step)


def replace_chunk(step, name, frame):
    """Replaces the chunk of an array that has one by the bytes of a zstd frame."""
    index = struct.pack("<QQ", 0, len(frame))
    [key] = [
        key for key in open_store(step).list().result() if key.startswith(f"{name}/c".encode())
    ]
    open_store(step).write(key, frame + index + struct.pack("<I", crc32c(index))).result()
    seal(step)


def lose_chunks(step, name):
    """Deletes the chunks of an array."""
    store = open_store(step)
    for key in store.list().result():
        if key.startswith(f"{name}/c".encode()):
            store.write(key, None).result()
    seal(step)


def bomb(num_blocks, *, says=None):
    """A zstd frame of a few bytes for each 128 KiB of zeros that it unpacks to, which ``says`` another size, or none."""
    frame = bytearray(MAGIC)
    frame += (
        bytes([0x00, (17 - 10) << 3]) if says is None else bytes([0xA0]) + struct.pack("<I", says)
    )
    for number in range(num_blocks):
        frame += ((BLOCK_BYTES << 3) | (1 << 1) | (number + 1 == num_blocks)).to_bytes(
            3, "little"
        ) + b"\0"
    return bytes(frame)


def crc32c(data):
    """The checksum that follows the index of a shard."""
    found = 0xFFFFFFFF
    for byte in data:
        found ^= byte
        for _ in range(8):
            found = (found >> 1) ^ (0x82F63B78 if found & 1 else 0)
    return found ^ 0xFFFFFFFF

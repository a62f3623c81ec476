"""LMDB's pages, read with bounds checks.

liblmdb trusts its file: one flipped bit in a page number and it reads beyond
the map, which is a SIGSEGV that no caller can catch.  It also allows one
environment per file and process, and its reader slots don't survive a fork.
A store needs very little of it: find a dozen values at open, list all values
once after ingest and in verify.  This module does that over any buffer, and
raises CorruptStore wherever liblmdb would trust.

The format is that of LMDB 0.9 (data version 1), 64-bit, little-endian;
structures as in `mdb.c` of OpenLDAP's LMDB: MDB_page, MDB_meta, MDB_db, MDB_node.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from lmdbstore.errors import CorruptStore, NotAStore

_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_HEADER = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_OVERFLOW_PAGES = struct.Struct("<I")  # in place of lower and upper
_META = struct.Struct("<IIQQ")  # magic, version, fixed address, map size
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow pages, entries, root
_TAIL = struct.Struct("<QQ")  # last page, transaction id
_NODE = struct.Struct("<HHHH")  # size low, size high, flags, key size
_PGNO = struct.Struct("<Q")
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 0x01, 0x02, 0x04, 0x08
_BIG_DATA, _SUB_DATA = 0x01, 0x02
_NO_PAGE = 0xFFFFFFFFFFFFFFFF


class Extent(NamedTuple):
    """Where a value lies: bytes from the start of the file, and how many."""

    offset: int
    length: int


class _Node(NamedTuple):
    key: bytes
    child: int  # a branch's page
    value: Extent
    flags: int


class Pages:
    """The newest committed state of an LMDB file.

    Parameters
    ----------
    buffer : bytes-like
        The whole file, usually a read-only map.

    Raises
    ------
    NotAStore
        The buffer isn't an LMDB file of this machine's kind.
    CorruptStore
        The file is shorter than its pages; later, any page that doesn't add up.

    Notes
    -----
    Threads: safe, nothing is kept but the buffer.  Processes: as the buffer.
    """

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.page_size = self._page_size()
        metas = [meta for meta in (self._meta(0), self._meta(self.page_size)) if meta]
        if not metas:
            raise CorruptStore("both meta pages of the LMDB file are damaged")
        _, self.last_page, self._root = max(metas)
        if len(buffer) < self.size:
            raise CorruptStore(f"the file is cut short: {len(buffer)} bytes, its pages need {self.size}")

    @property
    def size(self) -> int:
        """Bytes that the pages in use span, counted from the start of the file."""
        return (self.last_page + 1) * self.page_size

    def find(self, database: bytes, key: bytes) -> Extent | None:
        """Return where the value of a key lies, None when it isn't there."""
        root = self._database(database)
        return None if root is None else self._lookup(root, key, flags=(0, _BIG_DATA))

    def walk(self, database: bytes) -> Iterator[tuple[bytes, Extent]]:
        """Yield every key and where its value lies, in the order of the keys."""
        root = self._database(database)
        if root is None:
            return
        # A loop in the tree would go on for ever; no honest tree has more pages than the file.
        stack, left = [root], self.last_page + 1
        while stack:
            page, left = stack.pop(), left - 1
            if page == _NO_PAGE:
                continue
            if left < 0:
                raise CorruptStore("the pages of the B-tree form a loop")
            kind, nodes = self._nodes(page)
            if kind == _BRANCH:
                stack.extend(node.child for node in reversed(list(nodes)))
            else:
                yield from ((node.key, self._value(node, (0, _BIG_DATA))) for node in nodes)

    def databases(self) -> list[str]:
        """Return the names of the named databases."""
        names = []
        for node in self._leaf_nodes(self._root):
            if node.flags == _SUB_DATA:
                names.append(node.key.decode(errors="replace"))
        return names

    def _leaf_nodes(self, root: int) -> Iterator[_Node]:
        if root == _NO_PAGE:
            return
        kind, nodes = self._nodes(root)
        if kind != _LEAF:
            raise CorruptStore("the list of named databases is larger than any store's")
        yield from nodes

    def _page_size(self) -> int:
        if len(self.buffer) < 16 + _META.size + 2 * _DB.size + _TAIL.size:
            raise NotAStore(f"{len(self.buffer)} bytes are too few for an LMDB file")
        magic, version, _, _ = _META.unpack_from(self.buffer, 16)
        if magic != _MAGIC:
            raise NotAStore(f"it starts with {bytes(self.buffer[:8]).hex(' ')}, not as an LMDB file does")
        if version != _DATA_VERSION:
            raise NotAStore(f"LMDB data version {version}; stores are of version {_DATA_VERSION}")
        (size, *_) = _DB.unpack_from(self.buffer, 16 + _META.size)
        if size not in (1 << n for n in range(9, 17)):
            raise CorruptStore(f"an LMDB page size of {size} bytes")
        return size

    def _meta(self, at: int) -> tuple[int, int, int] | None:
        end = at + 16 + _META.size + 2 * _DB.size + _TAIL.size
        if end > len(self.buffer):
            return None
        _, _, flags, _, _ = _HEADER.unpack_from(self.buffer, at)
        magic, version, _, _ = _META.unpack_from(self.buffer, at + 16)
        main = _DB.unpack_from(self.buffer, at + 16 + _META.size + _DB.size)
        last_page, transaction = _TAIL.unpack_from(self.buffer, end - _TAIL.size)
        if not flags & _META_PAGE or (magic, version) != (_MAGIC, _DATA_VERSION):
            return None
        return transaction, last_page, main[7]

    def _database(self, name: bytes) -> int | None:
        """Return the root page of a named database, None when there is no such database."""
        found = self._lookup(self._root, name, flags=(_SUB_DATA,))
        if found is None:
            return None
        if found.length != _DB.size:
            raise CorruptStore(f"the record of database {name.decode()!r} has {found.length} bytes")
        _, flags, depth, _, _, _, _, root = _DB.unpack_from(self.buffer, found.offset)
        if flags:
            raise CorruptStore(f"database {name.decode()!r} has LMDB flags {flags:#x}; stores use none")
        return root

    def _lookup(self, root: int, key: bytes, *, flags: tuple[int, ...]) -> Extent | None:
        page = root
        for _ in range(32):  # LMDB's own limit
            if page == _NO_PAGE:
                return None
            kind, nodes = self._nodes(page)
            if kind == _LEAF:
                match = next((node for node in nodes if node.key == key), None)
                return self._value(match, flags) if match else None
            children = list(nodes)
            # the first key of a branch is empty in meaning: everything below the second
            page = next((n.child for n in reversed(children[1:]) if n.key <= key), children[0].child)
        raise CorruptStore("the B-tree is deeper than LMDB's limit")

    def _page(self, number: int) -> tuple[int, int, int, int]:
        """Return offset, flags, lower and upper of a page."""
        if not 2 <= number <= self.last_page:
            raise CorruptStore(f"page {number} of a file whose pages are 2 to {self.last_page}")
        at = number * self.page_size
        own, _, flags, lower, upper = _HEADER.unpack_from(self.buffer, at)
        if own != number:
            raise CorruptStore(f"page {number} says that it is page {own}")
        return at, flags, lower, upper

    def _nodes(self, number: int) -> tuple[int, Iterator[_Node]]:
        at, flags, lower, upper = self._page(number)
        if flags not in (_BRANCH, _LEAF):
            raise CorruptStore(f"page {number} has flags {flags:#x}, neither branch nor leaf")
        if not 16 <= lower <= upper <= self.page_size or lower % 2:
            raise CorruptStore(f"page {number} has bounds {lower} and {upper}")
        count = (lower - 16) // 2
        if flags == _BRANCH and count < 2:
            raise CorruptStore(f"branch page {number} has {count} children")
        places = struct.unpack_from(f"<{count}H", self.buffer, at + 16)
        return flags, (self._node(at, place, upper, flags == _BRANCH) for place in places)

    def _node(self, at: int, place: int, upper: int, branch: bool) -> _Node:
        if not upper <= place <= self.page_size - _NODE.size:
            raise CorruptStore(f"a node at {place} of the page at byte {at}")
        low, high, flags, key_size = _NODE.unpack_from(self.buffer, at + place)
        key_at = at + place + _NODE.size
        room = self.page_size - place - _NODE.size - key_size
        size = low | high << 16
        inline = 0 if branch else _PGNO.size if flags == _BIG_DATA else size
        if room < inline:
            raise CorruptStore(f"a node at {place} of the page at byte {at} runs over its page")
        key = bytes(self.buffer[key_at : key_at + key_size])
        child = size | flags << 32 if branch else 0
        return _Node(key, child, Extent(key_at + key_size, size), 0 if branch else flags)

    def _value(self, node: _Node, allowed: tuple[int, ...]) -> Extent:
        if node.flags not in allowed:
            raise CorruptStore(f"the value of key {node.key[:40]!r} has LMDB flags {node.flags:#x}")
        if node.flags != _BIG_DATA:
            return node.value
        (number,) = _PGNO.unpack_from(self.buffer, node.value.offset)
        at, flags, _, _ = self._page(number)
        (pages,) = _OVERFLOW_PAGES.unpack_from(self.buffer, at + 12)
        if flags != _OVERFLOW or number + pages > self.last_page + 1 or 16 + node.value.length > pages * self.page_size:
            raise CorruptStore(f"the value of key {node.key[:40]!r} doesn't fit its {pages} pages at page {number}")
        return Extent(at + 16, node.value.length)

"""The sides: what they are called, where they are, and what they are measured with."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A side.

    Attributes
    ----------
    module : str
        In this package; what it calls `convert` makes the peer's own format of the photos.
    function : str
        Of the module: from a Job to an iterable of batches.
    distribution : str
        Whose version to write down.
    pipelines : tuple of str
    """

    module: str
    function: str
    distribution: str
    pipelines: tuple[str, ...] = ("seed", "rrc")

    @property
    def ours(self) -> bool:
        """Whether it is lmdbstore's."""
        return self.module == "on_store"


SIDES = {
    "folder, cv2, DataLoader": Entry("on_folder", "cv2_dataloader", "opencv-python-headless"),
    "torchvision, tensors": Entry("on_torchvision", "tensors", "torchvision"),
    "torchvision, PIL": Entry("on_torchvision", "pil", "pillow"),
    "WebDataset": Entry("on_webdataset", "webloader", "webdataset"),
    "MosaicML Streaming": Entry("on_streaming", "dataloader", "mosaicml-streaming"),
    "LitData": Entry("on_litdata", "dataloader", "litdata"),
    "HF datasets": Entry("on_hf", "dataloader", "datasets"),
    "SPDL, threads": Entry("on_spdl", "threads", "spdl"),
    "SPDL, spdl.io": Entry("on_spdl", "decoder", "spdl-io", ("rrc",)),
    "DALI, CPU": Entry("on_dali", "iterator", "nvidia-dali-cuda130"),
    "lmdbstore, DataLoader": Entry("on_store", "dataloader", "lmdbstore"),
    "lmdbstore, BatchLoader": Entry("on_store", "threads", "lmdbstore"),
    "lmdbstore, BatchLoader, uint8": Entry("on_store", "threads_uint8", "lmdbstore", ("seed",)),
    "lmdbstore, tiled, BatchLoader": Entry("on_store", "threads_tiled", "lmdbstore", ("rrc",)),
    "lmdbstore, tiled, BatchLoader, uint8": Entry("on_store", "threads_tiled_uint8", "lmdbstore", ("rrc",)),
}

"""The disk tier: a versioned, copy-on-write, crash-consistent store for training state. No torch in here."""

from overspill.tiers.disk.core import Prepared
from overspill.tiers.disk.fileio import FileIO
from overspill.tiers.disk.layout import SlotSpec, TensorSpec
from overspill.tiers.disk.pins import PinInfo
from overspill.tiers.disk.reader import StoreReader
from overspill.tiers.disk.store import DiskStore

__all__ = ["DiskStore", "FileIO", "PinInfo", "Prepared", "SlotSpec", "StoreReader", "TensorSpec"]

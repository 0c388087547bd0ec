"""What this machine is: processor, memory and its limits, disks and their speed; and what is wrong with it.

Looks and measures, changes nothing. Imports no torch by itself.
"""

from __future__ import annotations

from overspill.probe.doctor import Finding, doctor, findings_of
from overspill.probe.load import OthersLoad
from overspill.probe.machine import probe

__all__ = ["Finding", "OthersLoad", "doctor", "findings_of", "probe"]

from .engine import VmapProcess as VmapProcess

"""The app of a SuperNode: a process for every message, which hands it to the one that lives through the run.

Nothing else may be imported here: Flower waits for it at every message.
"""

from flsv.engines.flower_resident import resident

app = resident("fedapp.federation:client")

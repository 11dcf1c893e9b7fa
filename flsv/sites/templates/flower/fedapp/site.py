"""The app of a SuperNode. Flower starts a process for every message, which passes it to one resident process.

Import nothing else here: Flower would wait for the import at every message.
"""

from flsv.sites.flower_resident import resident

app = resident("fedapp.federation:client")

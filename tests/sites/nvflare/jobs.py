"""NVFlare without its processes: a Controller to whose tasks an Executor of each site responds at once."""

from functools import partial
from types import SimpleNamespace

from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils import fobs

from flsv.sites import SiteClient
from flsv.sites.nvflare import FlsvController, FlsvExecutor
from helpers.sites import NAMES, SiteData, make_mlp_module, make_shapfed_loop


class Job:
    """A server and its sites, with workspaces below a folder. ``code`` is the module of the job's own code."""

    def __init__(self, folder, code):
        self.folder = folder
        self.code = code
        self.abort_signal = Signal()
        self.tasks = []
        self.cancelled = []
        #: The sites that the server can reach.
        self.present = set(NAMES)
        #: Whether a site answers a task.
        self.responses = lambda site, task: True
        self.executors = {}
        for part, site in enumerate(NAMES):
            client = SiteClient(make_mlp_module, partial(site_data, part), make_shapfed_loop)
            setattr(code, site, client)
            self.executors[site] = FlsvExecutor(f"{code.__name__}:{site}")

    def run(self, server):
        """Run the rounds that are left, as another job. All jobs have one id, as in NVFlare's simulator."""
        self.code.server = server
        self.controller().control_flow(self.abort_signal, self.context("server"))

    def controller(self):
        """Make a Controller that reaches the sites."""
        controller = FlsvController(f"{self.code.__name__}:server")
        controller.communicator = Wire(self)
        return controller

    def folder_of(self, name):
        """Make the workspace of the server or of a site."""
        folder = self.folder / name
        for part in ("local", "startup"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        return folder

    def context(self, name):
        """Make the context of the server or of a site."""
        root = self.folder_of(name)
        workspace = Workspace(str(root), name)
        registered_clients = [SimpleNamespace(name=site) for site in NAMES]
        # In place of the server's or site's engine: who takes part, and where files are.
        engine = SimpleNamespace(
            get_clients=lambda: registered_clients,
            get_workspace=lambda: workspace,
        )
        # In place of the job's runner, for which no filter of tasks or results is configured.
        config = SimpleNamespace(task_data_filters={}, task_result_filters={})
        runner = SimpleNamespace(config=config, **vars(config))
        manager = FLContextManager(
            engine=engine,
            identity_name=name,
            job_id="simulate_job",
            public_stickers={},
            private_stickers={FLContextKey.RUNNER: runner},
        )

        return manager.new_context()

    def execute(self, site, message, context=None):
        """Let a site respond to a message."""
        fl_ctx = context or self.context(site)
        return self.executors[site].execute("any", message, fl_ctx, Signal())


class Wire:
    """The Controller's communicator: it serializes both ways, as NVFlare does."""

    def __init__(self, job):
        self._job = job

    def send(self, task, fl_ctx, targets, *options):
        (site,) = targets
        self._job.tasks.append(task)
        if not self._job.responses(site, task):
            return

        message = fobs.loads(fobs.dumps(task.data))
        reply = self._job.execute(site, message)
        client_task = ClientTask(SimpleNamespace(name=site), task)
        client_task.result = fobs.loads(fobs.dumps(reply))
        task.result_received_cb(client_task=client_task, fl_ctx=fl_ctx)

    def cancel_task(self, task, *options):
        self._job.cancelled.append(task)

    def get_client_disconnect_time(self, name):
        if name in self._job.present:
            return None
        return 1.0


def site_data(part, node):
    return SiteData(part)

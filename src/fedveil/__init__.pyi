"""What `fedveil/__init__.py` loads when first used, for type checkers and editors."""

from fedveil.api.federation import Federation as Federation
from fedveil.api.federation import compare as compare
from fedveil.api.run import Run as Run
from fedveil.api.run import open_run as open_run
from fedveil.data.dataset import Dataset as Dataset
from fedveil.data.load import load as load
from fedveil.data.own.arrays import from_arrays as from_arrays
from fedveil.data.own.frames import from_frame as from_frame
from fedveil.data.own.torch_data import from_huggingface as from_huggingface
from fedveil.data.own.torch_data import from_torch as from_torch
from fedveil.data.partition import partition as partition
from fedveil.deploy.central_dp import CentralDP as CentralDP
from fedveil.deploy.dp_mod import dp_mod as dp_mod
from fedveil.errors import BudgetExhausted as BudgetExhausted
from fedveil.errors import ConfigError as ConfigError
from fedveil.errors import DataError as DataError
from fedveil.errors import FedveilError as FedveilError
from fedveil.errors import LedgerError as LedgerError
from fedveil.errors import UpdateRefused as UpdateRefused
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import configure as configure
from fedveil.experiment.config import replace as replace
from fedveil.experiment.config_files import load_config as load_config
from fedveil.experiment.plugins import register as register
from fedveil.experiment.published_copy import publish as publish
from fedveil.experiment.run import run
from fedveil.experiment.sections import LocalOptimizer
from fedveil.experiment.sections import Privacy as Privacy
from fedveil.experiment.sections import ServerOptimizer as ServerOptimizer
from fedveil.experiment.sections import Training as Training
from fedveil.experiment.verification import verification as verification
from fedveil.methods.adaptive_clipping import AdaptiveClipping as AdaptiveClipping
from fedveil.methods.banded_mf import BandedMF as BandedMF
from fedveil.methods.dp_fedsam import DPFedSAM as DPFedSAM
from fedveil.methods.dp_scaffold import DPScaffold as DPScaffold
from fedveil.methods.dp_scaffold import Scaffold as Scaffold
from fedveil.methods.fedavg import DPFedAvg as DPFedAvg
from fedveil.methods.fedavg import FedAvg as FedAvg
from fedveil.methods.gradient_compression import GradientCompression as GradientCompression
from fedveil.methods.time_adaptive import TimeAdaptive as TimeAdaptive
from fedveil.models.embed import embed as embed
from fedveil.models.lora import save_adapter as save_adapter
from fedveil.models.model_registry import register_model as register_model
from fedveil.models.trainable import fix as fix
from fedveil.papers.aldp_fl.baselines import GFLALDPA as GFLALDPA
from fedveil.papers.aldp_fl.baselines import LDPFed as LDPFed
from fedveil.papers.aldp_fl.method import ALDPFL as ALDPFL
from fedveil.papers.convergent_dp.method import NoisyFedAvg as NoisyFedAvg
from fedveil.papers.convergent_dp.method import NoisyFedProx as NoisyFedProx
from fedveil.papers.fedanc.baselines import Censor as Censor
from fedveil.papers.fedanc.baselines import Soteria as Soteria
from fedveil.papers.fedanc.method import FedANC as FedANC
from fedveil.papers.fedglp_adp.fisher_baselines import FedADDP as FedADDP
from fedveil.papers.fedglp_adp.fisher_baselines import FedDPA as FedDPA
from fedveil.papers.fedglp_adp.method import FedGLPADP as FedGLPADP
from fedveil.papers.fedglp_adp.sparse_baselines import BlurLus as BlurLus
from fedveil.papers.fedglp_adp.sparse_baselines import FedSMP as FedSMP
from fedveil.papers.ladp_fl.adapldp import AdapLDP as AdapLDP
from fedveil.papers.ladp_fl.baselines import AdapDPFL as AdapDPFL
from fedveil.papers.ladp_fl.baselines import NbAFL as NbAFL
from fedveil.papers.ladp_fl.baselines import SensitiveDP as SensitiveDP
from fedveil.papers.ladp_fl.method import LaDPFL as LaDPFL
from fedveil.papers.ladp_fl.noise_schedules import DPALDP as DPALDP
from fedveil.papers.ladp_fl.noise_schedules import TimeVaryingDP as TimeVaryingDP
from fedveil.platforms.releaser import NoisyMean as NoisyMean
from fedveil.platforms.releaser import Releaser as Releaser
from fedveil.statement.statement_layout import PrintedStatement
from fedveil.statement.statement_layout import to_markdown as to_markdown
from fedveil.tasks.classification import Binary as Binary
from fedveil.tasks.classification import Classification as Classification
from fedveil.tasks.classification import MultiLabel as MultiLabel
from fedveil.tasks.regression import Regression as Regression
from fedveil.tasks.segmentation import Segmentation as Segmentation
from fedveil.tasks.survival import Survival as Survival
from fedveil.tasks.task import Column as Column
from fedveil.tasks.task import Task as Task
from fedveil.tasks.task_registry import register_task as register_task
from fedveil.tasks.token_prediction import TokenPrediction as TokenPrediction

__version__: str
Optimizer = LocalOptimizer
Statement = PrintedStatement
certify = certify_config
train = run

"""Decide if a call is quantized, and how, without torch.distributed.

roles: one row a role, and Site. plan: make_plan returns a Plan or the reason for full precision. topology: nodes.
"""

from flash_allreduce_plugin.policy.plan import SUMS as SUMS
from flash_allreduce_plugin.policy.plan import BetweenTwo as BetweenTwo
from flash_allreduce_plugin.policy.plan import Collective as Collective
from flash_allreduce_plugin.policy.plan import FullPrecision as FullPrecision
from flash_allreduce_plugin.policy.plan import Plan as Plan
from flash_allreduce_plugin.policy.plan import WithAll as WithAll
from flash_allreduce_plugin.policy.plan import WithOneRoot as WithOneRoot
from flash_allreduce_plugin.policy.plan import bits_of as bits_of
from flash_allreduce_plugin.policy.plan import make_plan as make_plan
from flash_allreduce_plugin.policy.plan import matches as matches
from flash_allreduce_plugin.policy.plan import unmatched as unmatched
from flash_allreduce_plugin.policy.plan import widths_follow_errors as widths_follow_errors
from flash_allreduce_plugin.policy.roles import DISABLED as DISABLED
from flash_allreduce_plugin.policy.roles import EMBEDDING as EMBEDDING
from flash_allreduce_plugin.policy.roles import EMPTY as EMPTY
from flash_allreduce_plugin.policy.roles import EVALUATION as EVALUATION
from flash_allreduce_plugin.policy.roles import EXCLUDED as EXCLUDED
from flash_allreduce_plugin.policy.roles import FROZEN as FROZEN
from flash_allreduce_plugin.policy.roles import LAYER_NORM as LAYER_NORM
from flash_allreduce_plugin.policy.roles import LOW_SQNR as LOW_SQNR
from flash_allreduce_plugin.policy.roles import NOT_ENABLED as NOT_ENABLED
from flash_allreduce_plugin.policy.roles import NOT_INCLUDED as NOT_INCLUDED
from flash_allreduce_plugin.policy.roles import ONE_RANK as ONE_RANK
from flash_allreduce_plugin.policy.roles import SLOWER as SLOWER
from flash_allreduce_plugin.policy.roles import SMALL as SMALL
from flash_allreduce_plugin.policy.roles import SPARSE as SPARSE
from flash_allreduce_plugin.policy.roles import TRIAL as TRIAL
from flash_allreduce_plugin.policy.roles import WARM_UP as WARM_UP
from flash_allreduce_plugin.policy.roles import Role as Role
from flash_allreduce_plugin.policy.roles import Site as Site
from flash_allreduce_plugin.policy.roles import is_full as is_full

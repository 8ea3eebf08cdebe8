"""Where a request may lawfully go. Hard, and fail closed: what is not known to be allowed is not.

A site's jurisdictions are all the regions that it lies wholly within (``eu`` and ``de`` for Frankfurt). A tenant bound
to jurisdictions may use a site that shares one with each bound: the tenant's own, and the one the caller narrows to by
header. The header can only narrow.
"""

from extproc.model import Reason, Request, Site
from extproc.policy import Tenant


def barred(request: Request, tenant: Tenant, site: Site) -> Reason | None:
    """Return why *request* may not go to *site*, or ``None`` when it may."""
    if site.name in tenant.denied_sites or (tenant.sites is not None and site.name not in tenant.sites):
        return Reason.NOT_ALLOWED
    for bound in (tenant.jurisdictions, request.residency):
        if bound is not None and not bound & site.jurisdictions:
            return Reason.RESIDENCY
    return None


def may_use_model(tenant: Tenant, model: str) -> bool:
    """Tell whether the tenant may use this model (or adapter)."""
    return tenant.models is None or model in tenant.models

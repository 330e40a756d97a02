"""Parts for NVFlare jobs of your own: a privacy filter for a site's updates; needs nvflare."""

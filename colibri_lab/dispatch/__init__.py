"""From a layer's chosen experts to the calls that compute them."""

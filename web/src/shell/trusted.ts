// Trusted Types policy: only files of this page can become script URLs.

interface Policy {
  createScriptURL(url: string): string;
}
interface Factory {
  createPolicy(name: string, rules: { createScriptURL: (url: string) => string }): Policy;
}

function sameOrigin(url: string): string {
  if (new URL(url, document.baseURI).origin !== location.origin) throw new TypeError("not a script of this page");
  return url;
}

const factory = (globalThis as { trustedTypes?: Factory }).trustedTypes;
const policy: Policy = factory ? factory.createPolicy("llamado", { createScriptURL: sameOrigin }) : { createScriptURL: sameOrigin };

export function scriptUrl(url: string): string {
  return policy.createScriptURL(url);
}

// The one way from a text to the address of a script: the built files of this page (Trusted Types).

interface Policy {
  createScriptURL(url: string): string;
}
interface Factory {
  createPolicy(name: string, rules: { createScriptURL: (url: string) => string }): Policy;
}

function own(url: string): string {
  if (new URL(url, document.baseURI).origin !== location.origin) throw new TypeError("no script of this page");
  return url;
}

const factory = (globalThis as { trustedTypes?: Factory }).trustedTypes;
const policy: Policy = factory ? factory.createPolicy("llamado", { createScriptURL: own }) : { createScriptURL: own };

export function scriptUrl(url: string): string {
  return policy.createScriptURL(url);
}
